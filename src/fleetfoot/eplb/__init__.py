"""The balancing of experts over ranks: what counts their load, decides where they go, and moves them."""
