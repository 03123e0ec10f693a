"""Splitting a model into stages that different ranks run, microbatch by microbatch."""
