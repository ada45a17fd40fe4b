"""Silent bugs of distributed programs: each with the bug, and fixed."""
