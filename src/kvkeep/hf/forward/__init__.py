"""A forward of an attached model: masks, attention and positions, for one sequence or several."""
