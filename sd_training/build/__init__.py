"""Config becomes objects here and nowhere else, by explicit choices; no class path is ever read from a file."""
