"""Run records to figures. matplotlib is imported only when something is drawn."""
