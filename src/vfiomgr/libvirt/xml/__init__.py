"""Read, render and edit domain XML."""
