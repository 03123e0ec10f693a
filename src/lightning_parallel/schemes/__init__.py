"""The ways to spread a module over a mesh; pure torch."""
