"""What `make bench` measures: whole processes, side by side with the tools that people use."""
