"""Modes and GPU instances, as nvidia-smi reports them."""
