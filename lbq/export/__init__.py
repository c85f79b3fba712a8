"""Networks in other formats. Each module is one format, and imports what it needs when it is used."""
