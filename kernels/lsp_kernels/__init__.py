"""Triton kernels and their launchers: plain tensors in, plain tensors out."""
