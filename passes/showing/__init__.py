"""Plans and timelines as text, pictures, pages and traces."""
