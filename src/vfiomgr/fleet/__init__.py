"""Many hosts, each as a snapshot in a file: lists, checks, differences, and where guests fit."""
