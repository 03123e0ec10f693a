"""Activation checkpointing: which values of a forward are kept for backward, and which are computed again."""
