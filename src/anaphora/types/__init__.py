"""What passes between the parts: plain values, standard library only, encodable as messages."""
