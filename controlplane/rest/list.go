package rest

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// entry is a sandbox that should exist and that its node has.
type entry struct {
	row store.Sandbox
	sb  *agentpb.Sandbox
}

// filter is a parsed list query.
type filter struct {
	metadata     map[string]string
	states       map[e2b.State]bool
	ascending    bool
	startedAfter time.Time // inclusive; zero: no bound
	template     string
	limit        int
	after        cursor // zero: from the beginning
}

// listV1 answers the running sandboxes, unpaged.
func (a *API) listV1(w http.ResponseWriter, r *http.Request) error {
	metadata, err := parseMetadata(r.URL.Query().Get("metadata"))
	if err != nil {
		return err
	}
	f := filter{metadata: metadata, states: map[e2b.State]bool{e2b.Running: true}}
	entries, err := a.entries(r.Context(), f)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, listed(entries))
	return nil
}

// listV2 answers one page, newest first unless asked otherwise.
func (a *API) listV2(w http.ResponseWriter, r *http.Request) error {
	f, err := parseFilter(r.URL.Query())
	if err != nil {
		return err
	}
	entries, err := a.entries(r.Context(), f)
	if err != nil {
		return err
	}
	if f.states[e2b.Running] {
		running := 0
		for _, e := range entries {
			if publicState(e.sb) == e2b.Running {
				running++
			}
		}
		w.Header().Set("X-Total-Running", strconv.Itoa(running))
	}
	page := f.page(entries)
	if len(page) > 0 && f.more(entries, page) {
		w.Header().Set("X-Next-Token", cursorOf(page[len(page)-1], f.ascending).String())
	}
	reply.JSON(w, http.StatusOK, listed(page))
	return nil
}

// entries joins what runs with what should exist, filtered and in order.
func (a *API) entries(ctx context.Context, f filter) ([]entry, error) {
	sandboxes, err := a.node.List(ctx)
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(sandboxes))
	for i, sb := range sandboxes {
		ids[i] = sb.SandboxId
	}
	rows, err := a.store.Live(ctx, ids)
	if err != nil {
		return nil, err
	}
	found := []entry{}
	for _, sb := range sandboxes {
		row, exists := rows[sb.SandboxId]
		e := entry{row, sb}
		if exists && sb.GetVm().GetState() != agentpb.VMState_VM_STATE_STOPPING && f.matches(e) {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, f.order)
	return found, nil
}

func (f filter) matches(e entry) bool {
	for k, v := range f.metadata {
		if got, ok := e.row.Metadata[k]; !ok || got != v {
			return false
		}
	}
	return f.states[publicState(e.sb)] &&
		(f.template == "" || f.template == e.row.TemplateID) &&
		(f.startedAfter.IsZero() || !startedAt(e.sb).Before(f.startedAfter))
}

// order sorts by the start of the run, ties by id ascending.
func (f filter) order(x, y entry) int {
	byStart := startedAt(x.sb).Compare(startedAt(y.sb))
	if !f.ascending {
		byStart = -byStart
	}
	return cmp.Or(byStart, strings.Compare(x.row.ID, y.row.ID))
}

// page cuts the entries after the cursor to the limit.
func (f filter) page(entries []entry) []entry {
	if !f.after.zero() {
		last := entry{store.Sandbox{ID: f.after.id}, &agentpb.Sandbox{StartedAt: f.after.startedAt.UnixMilli()}}
		from, _ := slices.BinarySearchFunc(entries, last, f.order)
		for from < len(entries) && f.order(entries[from], last) <= 0 {
			from++
		}
		entries = entries[from:]
	}
	return entries[:min(f.limit, len(entries))]
}

func (f filter) more(entries, page []entry) bool {
	return entries[len(entries)-1].row.ID != page[len(page)-1].row.ID
}

func parseFilter(q url.Values) (f filter, err error) {
	if f.metadata, err = parseMetadata(q.Get("metadata")); err != nil {
		return f, err
	}
	if f.states, err = parseStates(q["state"]); err != nil {
		return f, err
	}
	switch q.Get("order") {
	case "", "desc":
	case "asc":
		f.ascending = true
	default:
		return f, apierr.New(apierr.BadRequest, "query \"order\" must be asc or desc")
	}
	if s := q.Get("startedAfter"); s != "" {
		if f.startedAfter, err = time.Parse(time.RFC3339Nano, s); err != nil {
			return f, apierr.New(apierr.BadRequest, "query \"startedAfter\" must be an RFC 3339 time")
		}
	}
	if f.template = q.Get("template"); strings.Contains(f.template, ":") {
		return f, apierr.New(apierr.BadRequest, "query \"template\" must not hold a tag")
	}
	if f.limit, err = parseLimit(q.Get("limit"), 100); err != nil {
		return f, err
	}
	if s := q.Get("nextToken"); s != "" {
		if f.after, err = parseCursor(s); err != nil {
			return f, err
		}
		if q.Get("order") != "" && f.after.ascending != f.ascending {
			return f, apierr.New(apierr.BadRequest, "query \"nextToken\" belongs to a list in the other order")
		}
		f.ascending = f.after.ascending
	}
	return f, nil
}

func parseStates(values []string) (map[e2b.State]bool, error) {
	states := map[e2b.State]bool{}
	for _, s := range strings.Split(strings.Join(values, ","), ",") {
		switch state := e2b.State(s); state {
		case "":
		case e2b.Running, e2b.Paused:
			states[state] = true
		default:
			return nil, apierr.New(apierr.BadRequest, "query \"state\" may hold running and paused, not %q", s)
		}
	}
	if len(states) == 0 {
		states = map[e2b.State]bool{e2b.Running: true, e2b.Paused: true}
	}
	return states, nil
}

func parseLimit(s string, most int) (int, error) {
	if s == "" {
		return most, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > most {
		return 0, apierr.New(apierr.BadRequest, "query \"limit\" must be between 1 and %d", most)
	}
	return n, nil
}

// parseMetadata undoes the SDKs' encoding of a metadata filter: the value, already decoded once as a query value, is
// percent-decoded as a whole, split at "&" and the first "=", and each part is decoded once more (e2b-wire B.5).
func parseMetadata(value string) (map[string]string, error) {
	if value == "" {
		return nil, nil
	}
	bad := apierr.New(apierr.BadRequest, "query \"metadata\" must be key=value pairs joined by &, percent-encoded")
	whole, err := url.PathUnescape(value)
	if err != nil {
		return nil, bad
	}
	pairs := map[string]string{}
	for _, pair := range strings.Split(whole, "&") {
		k, v, ok := strings.Cut(pair, "=")
		key, err1 := url.PathUnescape(k)
		val, err2 := url.PathUnescape(v)
		if !ok || err1 != nil || err2 != nil {
			return nil, bad
		}
		pairs[key] = val
	}
	return pairs, nil
}
