"""A host as a document: planned, applied, asserted, exported and reverted."""
