"""Conversations become text: compile a chat template, render rows with it, and record which message printed what."""
