"""What the script's own variables hold: published at each step boundary, put back in a replacement, or compared."""
