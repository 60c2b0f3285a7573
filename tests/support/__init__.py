"""What tests share: models, caches, servers and the results to compare with."""
