"""What launcher and workers say to each other, and what both decide by: records and pure functions of plain data."""
