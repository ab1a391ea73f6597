"""The picture of a host as a tree of text, SVG, one HTML file, or DOT."""
