"""How samples are divided among ranks, and how far training has read them."""
