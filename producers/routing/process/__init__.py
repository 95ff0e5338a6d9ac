"""The publisher's own process: a journal file, the child that sends what lies in it, and who watches the child."""
