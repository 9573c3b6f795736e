"""What a timeline says: where time goes, what the critical path is, what changed; and the page that shows it."""
