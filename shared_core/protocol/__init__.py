"""What launcher and workers send each other, and what both decide by: records and pure functions of plain data."""
