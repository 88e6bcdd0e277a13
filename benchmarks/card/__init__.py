"""What ``h200.py`` is made of: engines over one loaded model, the calibration that plan reads, a server's clients."""
