"""A GPU as a whole: who has it, in which mode it is, how MIG partitions it."""
