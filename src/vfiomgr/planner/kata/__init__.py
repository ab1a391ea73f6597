"""What Kata Containers makes of a host and a pod: pure rules."""
