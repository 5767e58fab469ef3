"""What to speculate: tree shapes, acceptance profiles and the planner. Plain Python and NumPy."""
