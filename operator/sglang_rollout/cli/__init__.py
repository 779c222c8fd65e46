"""`kubectl sgrollout`: look at fleets and steer them, with nothing but the user's own rights on the resource."""
