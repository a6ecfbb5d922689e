package rest

import (
	"encoding/base64"
	"strings"
	"time"

	"torpor/api/apierr"
	"torpor/api/id"
)

// cursor names the last element of a page. Clients see it as an opaque string: base64url of "<RFC 3339 time>__<id>", with
// "__asc" behind it in an ascending list.
type cursor struct {
	startedAt time.Time
	id        string
	ascending bool
}

func cursorOf(e entry, ascending bool) cursor {
	return cursor{startedAt(e.sb), e.row.ID, ascending}
}

func (c cursor) zero() bool { return c.id == "" }

func (c cursor) String() string {
	s := c.startedAt.UTC().Format(time.RFC3339Nano) + "__" + c.id
	if c.ascending {
		s += "__asc"
	}
	return base64.RawURLEncoding.EncodeToString([]byte(s))
}

func parseCursor(s string) (cursor, error) {
	bad := apierr.New(apierr.BadRequest, "query \"nextToken\" is not one of our tokens")
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(s, "="))
	if err != nil {
		return cursor{}, bad
	}
	parts := strings.Split(string(raw), "__")
	c := cursor{ascending: len(parts) == 3 && parts[2] == "asc"}
	if len(parts) != 2 && !c.ascending {
		return cursor{}, bad
	}
	if c.startedAt, err = time.Parse(time.RFC3339Nano, parts[0]); err != nil {
		return cursor{}, bad
	}
	if c.id = parts[1]; !id.ValidSandbox(c.id) {
		return cursor{}, bad
	}
	return c, nil
}
