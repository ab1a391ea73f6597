"""What guests of every virtual machine monitor have in common: their devices and places."""
