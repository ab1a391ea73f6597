"""What a guest is made of: its devices, their places, its memory and CPUs."""
