"""What a set of tasks needs of each stage's memory. Pure: numbers in, bytes out."""
