"""Where layers live when they are not in the window."""
