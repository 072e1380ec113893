"""What torch tells of one tensor before it is captured."""
