"""Plans, costs and timelines as text, pictures, pages and traces."""
