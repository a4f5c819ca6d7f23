"""Scanning and fixing: source, facts, engine, edits, forks, records, reports and the command line."""
