"""Training: a corpus, a vocabulary, objectives, and the loop that can be stopped anywhere and resumed bit for bit."""
