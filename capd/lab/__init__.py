"""The lab: errors of formats on records, measured while they are captured, and how they are stored."""
