"""Names, values and layouts of weight files. Knows no job."""
