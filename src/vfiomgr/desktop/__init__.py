"""Cards that the desktop uses: who uses them, how each releases them, and what is restored."""
