"""What is shown and written down: tables, the bars file."""
