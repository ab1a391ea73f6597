"""How a change is made: planned, locked, recorded, carried out by workers, undone, recovered."""
