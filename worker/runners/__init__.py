"""What moves bytes and tells the time: embedded, kafka, replay."""
