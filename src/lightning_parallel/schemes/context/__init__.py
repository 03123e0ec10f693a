"""Context parallelism: the sequence split over ranks, attention by exchange."""
