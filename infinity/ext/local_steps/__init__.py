"""Groups of ranks that train apart over slow links, and are averaged."""
