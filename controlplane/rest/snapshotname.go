package rest

import (
	"regexp"
	"strings"

	"torpor/api/apierr"
	"torpor/controlplane/store"
)

// defaultTag is that of a snapshot which was given a name without one.
const defaultTag = "default"

// The parts of a snapshot's name (e2b-wire B.8, Naming). A tag must not look like the UUID of a build.
var (
	nameRule = regexp.MustCompile(`^[a-z0-9_-]{1,128}$`)
	tagRule  = regexp.MustCompile(`^[a-z0-9_.-]{1,128}$`)
	uuidRule = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// parseName splits "name" or "name:tag", in lower case. tag is empty if none is given. ok is false for what cannot be one.
func parseName(s string) (name, tag string, ok bool) {
	name, tag, tagged := strings.Cut(strings.ToLower(s), ":")
	if !nameRule.MatchString(name) || tagged && (!tagRule.MatchString(tag) || uuidRule.MatchString(tag)) {
		return "", "", false
	}
	return name, tag, true
}

// newName reads the name asked for a new snapshot; both parts are empty if none is.
func newName(s *string) (name, tag string, err error) {
	if s == nil {
		return "", "", nil
	}
	name, tag, ok := parseName(*s)
	if !ok {
		return "", "", apierr.New(apierr.BadRequest, "field \"name\" must be a name of a-z, 0-9, _ and -, or such a name, a colon and a tag "+
			"of a-z, 0-9, _, . and - that is no UUID; each at most 128 characters")
	}
	if tag == "" {
		tag = defaultTag
	}
	return name, tag, nil
}

// filters are the ways to read a reference to a snapshot, the first that finds one counts: as an id, and as a name, which without
// a tag means tag.
func filters(ref, tag string) []store.SnapshotFilter {
	ways := []store.SnapshotFilter{{ID: ref}}
	if name, given, ok := parseName(ref); ok {
		if given != "" {
			tag = given
		}
		ways = append(ways, store.SnapshotFilter{Name: name, Tag: tag})
	}
	return ways
}

// namesOf spells a snapshot's names; never nil.
func namesOf(s store.Snapshot) []string {
	if s.Name == "" {
		return []string{}
	}
	return []string{s.Name + ":" + s.Tag}
}
