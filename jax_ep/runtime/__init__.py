"""What holds a group together: its native half, how processes meet, whether they live, and what failed."""
