"""Records: measurements as they are stored, and the code that writes and reads them."""
