"""How good drawn pictures and held-out losses are, with intervals."""
