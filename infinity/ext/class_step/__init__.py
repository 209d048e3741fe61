"""Steps by an optimizer's own code, over whole parameters or pieces."""
