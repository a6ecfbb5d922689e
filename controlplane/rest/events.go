package rest

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"torpor/api/apierr"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

type eventBody struct {
	Seq         uint64             `json:"seq"`
	At          time.Time          `json:"at"`
	Type        string             `json:"type"` // vm | envd | snapshot
	From        string             `json:"from"`
	To          string             `json:"to"`
	Reason      string             `json:"reason"`
	Incarnation uint64             `json:"incarnation"`
	PhasesMs    map[string]float64 `json:"phasesMs"`
}

// events answers the kept transitions, oldest first, also of a sandbox that has ended.
func (a *API) events(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	limit, err := parseLimit(q.Get("limit"), 500)
	if err != nil {
		return err
	}
	after := uint64(0)
	if s := q.Get("after"); s != "" {
		if after, err = strconv.ParseUint(s, 10, 64); err != nil {
			return apierr.New(apierr.BadRequest, "query \"after\" must be a sequence number")
		}
	}
	sandboxID := r.PathValue("sandboxID")
	if _, err := a.store.Record(r.Context(), sandboxID); errors.Is(err, store.ErrNotFound) {
		return notFound(sandboxID)
	} else if err != nil {
		return err
	}
	resp, err := a.node.Events(r.Context(), sandboxID, after, uint32(limit))
	if err != nil {
		return err
	}
	answer := struct {
		Events []eventBody `json:"events"`
		Next   uint64      `json:"next"` // the `after` with which to go on, now or later
	}{Events: []eventBody{}, Next: max(after, resp.Next)}
	for _, e := range resp.Events {
		phases := e.PhasesMs
		if phases == nil {
			phases = map[string]float64{}
		}
		answer.Events = append(answer.Events, eventBody{
			Seq: e.Seq, At: millis(e.At), Type: e.Type, From: e.From, To: e.To, Reason: e.Reason,
			Incarnation: e.Incarnation, PhasesMs: phases,
		})
	}
	reply.JSON(w, http.StatusOK, answer)
	return nil
}

// console answers the newest output of the serial console: the bytes as they are, or JSON for "Accept: application/json".
func (a *API) console(w http.ResponseWriter, r *http.Request) error {
	row, err := a.find(r)
	if err != nil {
		return err
	}
	tail, err := a.node.Console(r.Context(), row.ID)
	if err != nil {
		return err
	}
	if !strings.Contains(r.Header.Get("Accept"), "application/json") {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff") // the guest wrote it
		_, _ = w.Write(tail)
		return nil
	}
	reply.JSON(w, http.StatusOK, struct {
		SandboxID string `json:"sandboxID"`
		Console   string `json:"console"` // bytes that are not UTF-8 are replaced
	}{row.ID, strings.ToValidUTF8(string(tail), "\uFFFD")})
	return nil
}
