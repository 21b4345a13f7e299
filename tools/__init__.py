"""What makes generated pages and pictures of docs/."""
