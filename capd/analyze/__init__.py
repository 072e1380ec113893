"""What records come to together: pure functions over statistics and elements, no file and no store in sight."""
